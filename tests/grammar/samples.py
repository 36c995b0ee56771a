"""Larger grammars, each with texts that are in it and texts that are not."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    syntax: str
    source: str
    accepted: list[str]
    rejected: list[str]


JSON = Sample(
    "gbnf",
    r"""
# Any JSON document, blanks where the standard has them.
root    ::= blank value blank
value   ::= object | array | string | number | "true" | "false" | "null"
object  ::= "{" blank ( member ( "," blank member )* )? "}"
member  ::= string blank ":" blank value blank
array   ::= "[" blank ( value blank ( "," blank value blank )* )? "]"
string  ::= "\"" ( [^"\\\x00-\x1f] | "\\" ( ["\\/bfnrt] | "u" hex{4} ) )* "\""
number  ::= "-"? ( "0" | [1-9] [0-9]* ) ( "." [0-9]+ )? ( [eE] [+\-]? [0-9]+ )?
hex     ::= [0-9a-fA-F]
blank   ::= [ \t\r\n]*
""",
    ["{}", ' [1, -2.5e+3, {"a": [true, null]}]\n', '"\\u00e9 é \\n"', "0", '{"":{"":[[]]}}'],
    ["", "{", "[1,]", "01", '{"a":}', "'a'", '"\\x"', '"\n"', "truefalse", "[1 2]", "-"],
)

ARITHMETIC = Sample(
    "lark",
    r"""
?start: sum
?sum: sum ("+" | "-") product | product
?product: product ("*" | "/") power | power
?power: sign "^" power | sign
?sign: "-" sign | call
?call: NAME "(" [sum ("," sum)*] ")" | atom
?atom: NUMBER | NAME | "(" sum ")"
NAME: /[a-z][a-z0-9]*/
NUMBER: /[0-9]+/ ("." /[0-9]+/)?
%ignore " "
""",
    ["1", "1 + 2*x^-y^2", "f(1, g(), -(a/b))", "((((1))))", " - - 2", "1.5/ f ( )"],
    ["", "1 +", "(1", "f(,)", "1.", "2x y", "^2", "1 2"],
)

C_LIKE = Sample(
    "gbnf",
    r"""
root       ::= ws function+
function   ::= type declarator "(" ws ( parameter ( "," ws parameter )* )? ")" ws block
parameter  ::= type declarator
type       ::= ( "int" | "char" | "void" ) [ \n]+
declarator ::= "*" ws declarator | declarator "[" ws expr? "]" ws | name
block      ::= "{" ws statement* "}" ws
statement  ::= block | type declarator ( "=" ws expr )? ";" ws | expr? ";" ws
             | "if" ws "(" ws expr ")" ws statement ( "else" gap statement )?
             | "while" ws "(" ws expr ")" ws statement
             | "return" ( gap expr )? ";" ws
expr       ::= unary assign ws expr | choice
choice     ::= or ( "?" ws expr ":" ws choice )?
or         ::= or "||" ws and | and
and        ::= and "&&" ws equal | equal
equal      ::= equal ( "==" | "!=" ) ws order | order
order      ::= order ( "<=" | ">=" | "<" | ">" ) ws add | add
add        ::= add [+\-] ws mul | mul
mul        ::= mul [*/%] ws unary | unary
unary      ::= [-!*&] ws unary | postfix
postfix    ::= postfix ( "(" ws ( expr ( "," ws expr )* )? ")" | "[" ws expr "]" | "." ws word
                       | "->" ws word ) ws | primary
primary    ::= name | number ws | "\"" ( [^"\\\n] | "\\" . )* "\"" ws | "(" ws expr ")" ws
assign     ::= [+\-*/]? "="
name       ::= word ws
word       ::= [A-Za-z_] [A-Za-z0-9_]*
number     ::= [0-9]+
gap        ::= [ \n]+ ws
ws         ::= ( [ \n] | "//" [^\n]* "\n" | "/*" ( [^*] | "*"+ [^*/] )* "*"+ "/" )*
""",
    [
        "int main(void *x) { return 0; }",
        "int f(){}char *g(int a[3], int b){if(a[b]==1)return f()+a.b->c[2](1,2)%3;else {;}}",
        "void h() { // note\n  int x = a ? b : c || !d && -1 <= 2; x += *p = &q; /* * */ }",
        'int s() { while (1) print("a\\"b"); }',
    ],
    [
        "",
        "main() {}",
        "int f( {}",
        "int f() { return 1 }",
        "int f() { 1 + ; }",
        "int f() { a b; }",
        'int s() { "a',
        "int f() { x = ; }",
        "int f() { if (1) }",
    ],
)

SQL_LIKE = Sample(
    "lark",
    r"""
start: query [";"]
query: select | query "union"i ["all"i] select
select: "select"i ["distinct"i] _list{column} "from"i _list{source} [where] [group] [order]
column: "*" | expr ["as"i NAME]
source: NAME ["as"i NAME] | "(" query ")" "as"i NAME | source "join"i source "on"i expr
where: "where"i expr
group: "group"i "by"i _list{expr} ["having"i expr]
order: "order"i "by"i _list{key}
key: expr ["asc"i | "desc"i]
?expr: expr "or"i conjunction | conjunction
?conjunction: conjunction "and"i negation | negation
?negation: "not"i negation | comparison
?comparison: sum [("=" | "<>" | "<" | ">" | "<=" | ">=" | "like"i) sum]
    | sum "in"i "(" (query | _list{expr}) ")"
    | sum "is"i ["not"i] "null"i
?sum: sum ("+" | "-" | "||") term | term
?term: term ("*" | "/") atom | atom
?atom: NAME ["." NAME] | NUMBER | STRING | NAME "(" ["*" | _list{expr}] ")" | "(" expr ")"
_list{x}: x ("," x)*
NAME: /[a-z_][a-z0-9_]*/i
NUMBER: /[0-9]+(\.[0-9]+)?/
STRING: /'([^']|'')*'/
%import common (WS, SQL_COMMENT)
%ignore WS
%ignore SQL_COMMENT
""",
    [
        "SELECT * FROM t",
        "select a, b.c as d from t as x join u on x.id = u.id where not (a <> '''' or b in (1,2))",
        "select count(*) from (select 1 from t) as q group by a having sum(b) > 2 order by a desc;",
        "select distinct a from t union all select b from u -- the end\n",
    ],
    [
        "",
        "select",
        "select from t",
        "select a from t where",
        "select a from t order a",
        "select 'a from t",
        "select a from t where b in ()",
        "select a,, b from t",
    ],
)

SAMPLES = {"json": JSON, "arithmetic": ARITHMETIC, "c": C_LIKE, "sql": SQL_LIKE}
