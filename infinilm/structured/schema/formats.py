"""The enforced formats as regular expressions; all others are annotations."""

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_YEAR = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_URI_CHAR = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_PATH = rf"(?:/?{_URI_CHAR}+(?:/{_URI_CHAR}*)*|/)?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.\-]*:(?://(?:[a-zA-Z0-9\-._~]|%[0-9a-fA-F]{{2}})+(?::[0-9]{{1,5}})?(?:/{_URI_CHAR}*)*|{_PATH})"
_URI_END = rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
_NO_COLON = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=@]|%[0-9a-fA-F]{2})"
_RELATIVE = rf"(?:/?{_NO_COLON}+(?:/{_URI_CHAR}*)*|/)?"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_LITERAL = r"(?:[a-zA-Z0-9 _\-,:;=@!\"'%&<>/#~]|\\[dDwWsSnrt.\\/+*?()\[\]{}|^$\-]|\.)"
_CLASS = r"\[\^?(?:[a-zA-Z0-9_ .]|\\[dDwWsS.\\/\-\]])+\]"
_PIECE = rf"(?:(?:{_LITERAL}|{_CLASS})[*+?]?)"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uri-reference": f"(?:{_URI}|{_RELATIVE}){_URI_END}",
    "iri": _URI + _URI_END,
    "iri-reference": f"(?:{_URI}|{_RELATIVE}){_URI_END}",
    "uri-template": rf"(?:{_URI}|{_RELATIVE})(?:\{{[a-z]{{1,30}}\}}(?:/{_URI_CHAR}*)?)*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": rf"\^?(?:{_PIECE}|\({_PIECE}+(?:\|{_PIECE}+)*\)[*+?]?)*\$?",
}
"""A pattern is stricter than its format if that is not a regular language, or if validators disagree."""

AS_THEY_ARE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance enforces itself."""
ALIASES = {"idn-email": "email", "idn-hostname": "hostname"}
