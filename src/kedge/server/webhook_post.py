"""One POST to an address that somebody configured: signed, bounded in time, and never to where it has no business.

A name is resolved once, every address it has is looked at, and the connection goes to the one that was looked at: what
the name says a moment later does not matter. Redirects are not followed, proxies of the environment not used.
Signatures are those of standardwebhooks.com, for which most languages have a library.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import ipaddress
import re
import secrets
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from kedge.errors import Validation
from kedge.version import __version__

_CONNECT_S = 5.0  # for each address
_POST_S = 10.0  # for all of it: name, connection, handshake, answer
_PORTS = {"https": 443, "http": 80}
_MOST_CHARACTERS = 2000
_SECRET = "whsec_"  # nosec B105 # how one begins
_PRINTABLE = re.compile(r"[!-~]+")

# What `is_global` lets pass, or older Pythons do: benchmarks, documents, tunnels to IPv4 addresses of any kind, and the
# address at which Azure serves its virtual machines.
_NOWHERE = tuple(
    map(
        ipaddress.ip_network,
        ("0.0.0.0/8", "168.63.129.16/32", "192.0.0.0/24", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
         "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
)  # fmt: skip
_UNICAST = ipaddress.ip_network("2000::/3")  # all IPv6 addresses of the internet
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def new_secret() -> str:
    return _SECRET + base64.b64encode(secrets.token_bytes(32)).decode()


def parse_url(text: str, *, allow_private: bool) -> SplitResult:
    """An address that may be posted to; Validation says why not. Where its name leads is looked up when it is used."""
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise Validation("the URL is not valid", hint="use one such as https://example.org/hooks/kedge") from None
    if len(text) > _MOST_CHARACTERS or _PRINTABLE.fullmatch(text) is None or not url.hostname or port == 0:
        raise Validation("the URL is not valid", hint="use one such as https://example.org/hooks/kedge")
    if url.scheme != "https" and not (allow_private and url.scheme == "http"):
        raise Validation(f"a webhook needs https (got {url.scheme or 'no scheme'})", hint="use https://…")
    if "@" in url.netloc or url.fragment:
        raise Validation("the URL has a user or a fragment", hint="put what the receiver needs into its path or query")
    return url


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet, and not to this machine, its networks or its cloud's services."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address not in _UNICAST:
            return False
    is_nowhere = any(address.version == network.version and address in network for network in _NOWHERE)
    return address.is_global and not address.is_multicast and not is_nowhere


def resolve(url: SplitResult, *, allow_private: bool) -> list[str]:
    """The addresses of a URL's host; Validation if one of them is private, or there is none."""
    assert url.hostname is not None  # as `parse_url` says  # nosec B101
    try:
        answers = socket.getaddrinfo(url.hostname, _port(url), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Validation(f"the host {url.hostname[:200]} has no address", hint="check the spelling") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in answers))
    private = [address for address in addresses if not is_public(ipaddress.ip_address(address.partition("%")[0]))]
    if private and not allow_private:
        raise Validation(
            f"the host {url.hostname[:200]} has a private address",
            hint="webhooks go to public addresses only, unless kedge serve has --allow-private-webhooks",
        )
    return addresses


def _port(url: SplitResult) -> int:
    return url.port or _PORTS[url.scheme]


def _host(url: SplitResult) -> str:
    """As a browser sends it: with a port only if it is not the scheme's own."""
    name = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return f"{name}" if _port(url) == _PORTS[url.scheme] else f"{name}:{_port(url)}"


@dataclass(frozen=True, slots=True)
class Message:
    id: str  # the same however often it is sent
    body: bytes


def signature(secret: str, message: Message, at_s: int) -> str:
    key = base64.b64decode(secret.removeprefix(_SECRET))
    signed = b".".join((message.id.encode(), str(at_s).encode(), message.body))
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def post(text: str, secret: str, message: Message, *, allow_private: bool) -> str:
    """Send it. "" when the receiver took it (2xx), else why not: it may be sent again.

    Only the system's resolver, which has limits of its own, can make it take longer than `_POST_S`.
    """
    until_s = time.monotonic() + _POST_S
    try:
        url = parse_url(text, allow_private=allow_private)
        addresses = resolve(url, allow_private=allow_private)
    except Validation as error:
        return error.message
    at_s = int(time.time())
    headers = {
        "host": _host(url),
        "content-type": "application/json",
        "user-agent": f"kedge/{__version__}",
        "webhook-id": message.id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": signature(secret, message, at_s),
        "connection": "close",
    }
    try:
        with _connect(url, addresses, until_s) as connected:
            status = _send(url, connected, message.body, headers, until_s)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not valid: {error.verify_message}"
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, TimeoutError) or time.monotonic() >= until_s:
            return "it did not answer in time"
        return f"it cannot be reached: {type(error).__name__}"
    return "" if 200 <= status < 300 else f"it answered {status}"


def _connect(url: SplitResult, addresses: list[str], until_s: float) -> socket.socket:
    """A connection to the first address that takes one; over TLS, its handshake is still to be made."""
    problem: OSError = OSError("no address")
    for address in addresses[:3]:
        try:
            plain = socket.create_connection((address, _port(url)), timeout=min(_CONNECT_S, _left(until_s)))
        except OSError as error:
            problem = error
            continue
        if url.scheme == "http":
            return plain
        context = ssl.create_default_context()
        return context.wrap_socket(plain, server_hostname=url.hostname, do_handshake_on_connect=False)
    raise problem


def _send(url: SplitResult, connected: socket.socket, body: bytes, headers: dict[str, str], until_s: float) -> int:
    # The timeout of a socket starts again with each byte: this one does not.
    deadline = threading.Timer(_left(until_s), _end, [connected])
    deadline.daemon = True
    deadline.start()
    try:
        connected.settimeout(_POST_S)
        if isinstance(connected, ssl.SSLSocket):
            connected.do_handshake()
        connection = http.client.HTTPConnection(headers["host"])
        connection.sock = connected
        path = url.path or "/"
        connection.request("POST", f"{path}?{url.query}" if url.query else path, body, headers)
        return connection.getresponse().status
    finally:
        deadline.cancel()


def _left(until_s: float) -> float:
    if (left_s := until_s - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself
