"""The terminals that a Lark grammar can import from `common`, in Lark syntax.

Each is the set of texts that the name stands for; where Lark would take the shortest of several
matches, such as up to the first closing quote, there are no others here.
"""

COMMON: dict[str, str] = {
    "DIGIT": '"0".."9"',
    "HEXDIGIT": '"0".."9" | "a".."f" | "A".."F"',
    "INT": "DIGIT+",
    "SIGNED_INT": '("+" | "-")? INT',
    "DECIMAL": 'INT "." INT? | "." INT',
    "_EXP": '("e" | "E") SIGNED_INT',
    "FLOAT": "INT _EXP | DECIMAL _EXP?",
    "SIGNED_FLOAT": '("+" | "-")? FLOAT',
    "NUMBER": "FLOAT | INT",
    "SIGNED_NUMBER": '("+" | "-")? NUMBER',
    "_STRING_INNER": r"/[^\n]*/",
    "_STRING_ESC_INNER": r'/([^"\\\n]|\\[^\n])*/',
    "ESCAPED_STRING": r'"\"" _STRING_ESC_INNER "\""',
    "LCASE_LETTER": '"a".."z"',
    "UCASE_LETTER": '"A".."Z"',
    "LETTER": "UCASE_LETTER | LCASE_LETTER",
    "WORD": "LETTER+",
    "CNAME": '("_" | LETTER) ("_" | LETTER | DIGIT)*',
    "WS_INLINE": r"/[ \t]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "CR": r'"\r"',
    "LF": r'"\n"',
    "NEWLINE": "(CR? LF)+",
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "C_COMMENT": r"/\/\*([^*]|\*+[^*\/])*\*+\//",
    "SQL_COMMENT": r"/--[^\n]*/",
}
