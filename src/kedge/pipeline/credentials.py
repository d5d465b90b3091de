"""What is a credential: recognised by its name, however that is written, and inside texts by what is before it."""

from __future__ import annotations

import re
from functools import lru_cache

# Everything inside these is one, whatever it is called.
_CARRIERS = {
    "auth", "authentication", "authorization", "cookies", "credentials", "env", "extraheaders", "headers",
}  # fmt: skip
_ENDINGS = (
    "apikey", "authorization", "bearer", "connectionstring", "cookie", "credential", "credentials", "dsn", "key",
    "passphrase", "passwd", "password", "pwd", "secret", "signature", "token",
)  # fmt: skip
_IN_TEXT = re.compile(
    r"(//)[^@/\s]*(?=@)|((?:password|passwd|pwd|secret|token|key|signature|sig)=)(?:'[^']*'|[^&\s]*)|(bearer\s+)\S+",
    re.IGNORECASE,
)


def plain_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_credential(name: str) -> bool:
    return plain_name(name).endswith(_ENDINGS)


@lru_cache(256)  # names of parameters, mostly: the same ones at every step
def has_credentials(name: str) -> bool:
    """Whether what has this name is a credential, or holds some."""
    return plain_name(name) in _CARRIERS or is_credential(name)


def without_credentials(text: str) -> str:
    """A text for people: users, passwords and keys in URLs and connection strings are left out."""
    return _IN_TEXT.sub(r"\1\2\3…", text)
