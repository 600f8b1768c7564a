"""How one connection is let in by the TCP store's server: hello, perhaps proofs, welcome.

Until the welcome is given nothing else is listened to, and where there is a secret, a client
that has not shown that it knows it learns nothing of the server but the protocol, and that the
server knows it.
"""

from __future__ import annotations

from ..errors import StoreRefused
from .secret import HOW, Exchange, Role, prove, proves
from .wire import PROTOCOL, Frame

HANDSHAKE_BYTES = 8 * 1024
"""The longest frame of a client that is not in yet."""

LABEL_CHARACTERS = 1024


class Admission:
    """One client's way in. `nonce` is fresh for each connection; without a secret it goes unused.

    client: the label of the client that is in, and None until then.
    """

    def __init__(self, job: str, secret: bytes | None, nonce: str) -> None:
        self.client: str | None = None
        self._job = job
        self._secret = secret
        self._nonce = nonce
        self._hello: Frame | None = None
        self._exchange: Exchange | None = None

    def hear(self, frame: Frame) -> Frame:
        """The answer to the client's next frame, or StoreRefused by name."""
        if self._hello is None:
            self._hello = _checked(frame)
            if self._secret is None:
                return self._welcome(self._hello)
            return Frame("challenge", frame.id, {"nonce": self._nonce})
        due = "nonce" if self._exchange is None else "response"
        if frame.op != due or self._secret is None:
            raise StoreRefused(f"a {due} was due from this client, got {frame.op}")
        if self._exchange is None:
            job = self._hello.fields["job"]
            self._exchange = Exchange(self._nonce, frame.fields["nonce"], job)
            proof = prove(self._secret, Role.SERVER, self._exchange)
            return Frame("proof", frame.id, {"proof": proof})
        if not proves(frame.fields["proof"], self._secret, Role.CLIENT, self._exchange):
            raise StoreRefused(f"has another secret than this client: {HOW}")
        return self._welcome(self._hello)

    def _welcome(self, hello: Frame) -> Frame:
        job = hello.fields["job"]
        # Who names no job asks whose store it is, and learns it by the welcome.
        if self._job and job not in ("", self._job):
            raise StoreRefused(f"serves job {self._job!r}, not {job!r}")
        self.client = hello.fields["client"]
        return Frame("welcome", hello.id, {"protocol": PROTOCOL, "job": self._job})


def _checked(hello: Frame) -> Frame:
    if hello.op != "hello":
        raise StoreRefused(f"a connection begins with hello, got {hello.op}")
    spoken, label = hello.fields["protocol"], hello.fields["client"]
    if spoken != PROTOCOL:
        raise StoreRefused(f"speaks protocol {PROTOCOL}, not {spoken}")
    if len(label) > LABEL_CHARACTERS:
        raise StoreRefused(f"a client's label is at most {LABEL_CHARACTERS} long, got {len(label)}")
    return hello
