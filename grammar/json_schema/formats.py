"""The `format`s that are enforced, as regular expressions.

Sources: RFC 3339 (dates, times, durations), RFC 5321 (email, without its limits of size), RFC 6531
(internationalised email), RFC 1123 and 5890 (hostnames), RFC 2673 and 4291 (addresses), RFC 3986
(URIs), RFC 3987 (IRIs), RFC 6570 (URI templates), RFC 4122 (uuid), RFC 6901 (JSON pointers).

What is written is valid to all readers; some of what is valid is not written:

- dates: no year 0000; times: a capital T and Z, no leap seconds;
- hostname: no label with hyphens in its third and fourth place, as encoded ones (``xn--``) have:
  which of them are valid is no regular question;
- idn-hostname, idn-email: up to three labels, each as in hostname but without capitals, or at most
  eleven letters (lower-case Latin, Greek or Cyrillic, kana, Han, Hangul), digits and hyphens;
- regex: groups inside groups to a depth of three; nothing whose validity differs between ECMA-262
  and Python.

Formats for other kinds of values and of other specifications (``int32``, ``double``, ``byte``,
``password``, ...) are annotations: they constrain nothing.
"""

from __future__ import annotations


def _dates(year: str, year_of_leap: str) -> str:
    return (
        rf"(?:{year}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
        r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
        r"|02-(?:0[1-9]|1\d|2[0-8]))"
        rf"|{year_of_leap}-02-29)"
    )


_LEAP = r"\d\d(?:0[48]|[2468][048]|[13579][26])"
_DATE = _dates(
    r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)",
    rf"(?:{_LEAP}|(?:0[48]|[2468][048]|[13579][26])00)",
)
_ANY_DATE = _dates(r"\d{4}", rf"(?:{_LEAP}|(?:[02468][048]|[13579][26])00)")
_OFFSET = r"[+\-](?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z|{_OFFSET})"
_ANY_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[Zz]|{_OFFSET})"
_CLOCK = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DURATION = rf"P(?:\d+W|{_CLOCK}|(?:\d+D|\d+M(?:\d+D)?|\d+Y(?:\d+M(?:\d+D)?)?)(?:{_CLOCK})?)"

_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = r"[0-9A-Fa-f]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = (
    rf"(?:(?:{_H16}:){{6}}{_LS32}"
    rf"|::(?:{_H16}:){{5}}{_LS32}"
    rf"|(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}"
    rf"|(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}"
    rf"|(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}"
    rf"|(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}"
    rf"|(?:(?:{_H16}:){{0,6}}{_H16})?::)"
)


def _label(letters: str, most: int) -> str:
    """Up to `most` letters and, inside, hyphens; not both in the third and the fourth place."""
    one, any_one = f"[{letters}]", rf"[{letters}\-]"
    return (
        rf"{one}(?:{any_one}{{0,2}}{one}"
        rf"|{any_one}(?:{one}{any_one}|-{one}){any_one}{{0,{most - 5}}}{one})?"
    )


_SHORT = r"(?=[^]{1,253}$)"
_ANY_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_ANY_DOMAIN = rf"{_ANY_LABEL}(?:\.{_ANY_LABEL})*"
_LABEL = _label("A-Za-z0-9", 63)
_HOSTNAME = rf"{_SHORT}{_LABEL}(?:\.{_LABEL})*"
# Letters that IDNA 2008 allows anywhere in a label, all written from left to right. Eleven of them
# have an encoded form of at most 63 characters.
_LETTERS = (
    "a-z\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f\u3041-\u3094\u30a1-\u30fa"
    "\u4e00-\u9fff\uac00-\ud7a3"
)
_IDN_LABEL = rf"(?:{_label('a-z0-9', 63)}|{_label(_LETTERS + '0-9', 11)})"
_IDN_HOSTNAME = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,2}}"


def _email(more: str, domain: str) -> str:
    atom = rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~\-{more}]+"
    quoted = rf'"(?:[ !#-\[\]-~{more}]|\\[ -~])*"'
    address = rf"\[(?:{_IPV4}|IPv6:{_IPV6})\]"
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{domain}|{address})"


# ucschar and iprivate of RFC 3987.
_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane * 0x10000)}-{chr(plane * 0x10000 + 0xFFFD)}" for plane in range(1, 14)
)
_UCS += "\U000e1000-\U000efffd"
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_PERCENT = r"%[0-9A-Fa-f]{2}"


def _references(more: str, more_in_query: str) -> tuple[str, str]:
    """Whole and relative references, with `more` besides the unreserved characters of ASCII."""
    plain = rf"A-Za-z0-9\-._~!$&'()*+,;={more}"
    character = rf"(?:[{plain}:@]|{_PERCENT})"
    no_colon = rf"(?:[{plain}@]|{_PERCENT})"
    name = rf"(?:[{plain}]|{_PERCENT})*"
    user = rf"(?:[{plain}:]|{_PERCENT})*"
    future = r"[vV][0-9A-Fa-f]+\.[A-Za-z0-9\-._~!$&'()*+,;=:]+"
    authority = rf"(?:{user}@)?(?:\[(?:{_IPV6}|{future})\]|{name})(?::\d*)?"
    segments = rf"(?:/{character}*)*"
    absolute = rf"/(?:{character}+{segments})?"
    query = rf"\?(?:[{plain}:@/?{more_in_query}]|{_PERCENT})*"
    tail = rf"(?:{query})?(?:#(?:{character}|[/?])*)?"
    whole = (
        r"[A-Za-z][A-Za-z0-9+\-.]*:"
        rf"(?://{authority}{segments}|{absolute}|{character}+{segments}|){tail}"
    )
    return whole, rf"(?://{authority}{segments}|{absolute}|{no_colon}+{segments}|){tail}"


_URI, _RELATIVE_URI = _references("", "")
_IRI, _RELATIVE_IRI = _references(_UCS, _PRIVATE)

_VARIABLE_CHARACTER = rf"(?:[A-Za-z0-9_]|{_PERCENT})"
_VARIABLE = rf"{_VARIABLE_CHARACTER}(?:\.?{_VARIABLE_CHARACTER})*(?::[1-9]\d{{0,3}}|\*)?"
_URI_TEMPLATE = (
    rf"(?:[!#-$&-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|{_PERCENT}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

_POINTER = r"(?:/(?:[^~/]|~[01])*)*"


def _regex(depth: int) -> str:
    """Regular expressions with groups to a depth, as texts."""
    escape = r"\\[dDwWsSnrtfv.*+?()\[\]{}|^$/\\]"
    single = r"[A-Za-z0-9_ .,:;/@#%=+*?!<>()$'\"]|" + escape
    members = rf"(?:a-z|A-Z|a-f|A-F|0-9|{single})+"
    characters = rf"\[\^?(?:-?{members}|{members}-)\]"
    pairs = "|".join(f"{low},[{low}-9]" for low in range(10))
    count = rf"\{{(?:\d{{1,3}},?|{pairs}|\d,[1-9]\d{{1,2}}|[1-9]\d,[1-9]\d\d)\}}"
    quantifier = rf"(?:(?:[*+?]|{count})\??)?"
    atom = rf"[^\\()\[\]{{}}|^$*+?\n\r\u2028\u2029]|{escape}|{characters}"
    others = r"[|^$]|\\[bB]"
    if depth:
        inner = _regex(depth - 1)
        atom += rf"|\((?:\?:)?{inner}\)"
        others += rf"|\(\?[=!]{inner}\)"
    return rf"(?:(?:{atom}){quantifier}|{others})*"


# Each is a whole match.
PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _email("", _ANY_DOMAIN),
    "idn-email": _email("\u0080-\U0010ffff", _IDN_HOSTNAME),
    "hostname": _HOSTNAME,
    "idn-hostname": _IDN_HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|{_RELATIVE_URI})",
    "iri": _IRI,
    "iri-reference": rf"(?:{_IRI}|{_RELATIVE_IRI})",
    "uri-template": _URI_TEMPLATE,
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
    "regex": _regex(3),
}

# All that may be valid, where that is more: what is not valid is none of these. None: no such
# pattern is known, and that a text is not valid cannot be enforced.
WIDER: dict[str, str | None] = {
    "date": _ANY_DATE,
    "time": _ANY_TIME,
    "date-time": rf"{_ANY_DATE}[Tt]{_ANY_TIME}",
    "hostname": rf"{_SHORT}{_ANY_DOMAIN}",
    "idn-email": None,
    "idn-hostname": None,
    "regex": None,
}
