"""The `format`s that are enforced, as regular expressions.

Sources: RFC 3339 (dates, times, durations; capital T and Z, no leap seconds), RFC 5321 (email,
without its limits of size), RFC 1123 (hostname), RFC 2673 and 4291 (addresses), RFC 3986 (URIs),
RFC 4122 (uuid), RFC 6901 (JSON pointers).
"""

from __future__ import annotations

_YEAR_OF_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
    rf"|{_YEAR_OF_LEAP}-02-29)"
)
_OFFSET = r"(?:Z|[+\-](?:[01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?{_OFFSET}"
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
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_HOSTNAME = rf"(?=.{{1,253}}$){_DOMAIN}"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = (
    rf"(?:{_ATEXT}(?:\.{_ATEXT})*|{_QUOTED})"
    rf"@(?:{_DOMAIN}|\[(?:{_IPV4}|IPv6:{_IPV6})\])"
)

_PERCENT = r"%[0-9A-Fa-f]{2}"
_PCHAR = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_PERCENT})"
_NO_COLON = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=@]|{_PERCENT})"
_NAME = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|{_PERCENT})*"
_USER = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:]|{_PERCENT})*"
_FUTURE = r"v[0-9A-Fa-f]+\.[A-Za-z0-9\-._~!$&'()*+,;=:]+"
_AUTHORITY = rf"(?:{_USER}@)?(?:\[(?:{_IPV6}|{_FUTURE})\]|{_NAME})(?::\d*)?"
_SEGMENTS = rf"(?:/{_PCHAR}*)*"
_ABSOLUTE = rf"/(?:{_PCHAR}+{_SEGMENTS})?"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+\-.]*:"
    rf"(?://{_AUTHORITY}{_SEGMENTS}|{_ABSOLUTE}|{_PCHAR}+{_SEGMENTS}|){_TAIL}"
)
_RELATIVE = rf"(?://{_AUTHORITY}{_SEGMENTS}|{_ABSOLUTE}|{_NO_COLON}+{_SEGMENTS}|){_TAIL}"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"

# Each is a whole match.
PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|{_RELATIVE})",
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
}

# Formats of the specification that are no regular language, or too loosely defined to enforce.
REFUSED = frozenset({"regex", "idn-email", "idn-hostname", "iri", "iri-reference", "uri-template"})
