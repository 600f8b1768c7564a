"""How one connection is let in by the TCP store's server: hello, perhaps a challenge, welcome.

Until the welcome is given nothing else is listened to, and where there is a secret, a client
that has not shown that it knows it learns nothing of the server but the protocol.
"""

from __future__ import annotations

from ..errors import StoreRefused, present
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

    def hear(self, frame: Frame) -> Frame:
        """The answer to the client's next frame, or StoreRefused by name."""
        if self._hello is None:
            self._hello = _checked(frame)
            if self._secret is None:
                return self._welcome(self._hello, None)
            return Frame("challenge", frame.id, {"nonce": self._nonce})
        if frame.op != "response":
            raise StoreRefused(f"a challenge is answered by response, got {frame.op}")
        secret = present(self._secret, "the secret of a challenge")
        exchange = Exchange(self._nonce, frame.fields["nonce"], self._hello.fields["job"])
        if not proves(frame.fields["proof"], secret, Role.CLIENT, exchange):
            raise StoreRefused(f"has another secret than this client: {HOW}")
        return self._welcome(self._hello, prove(secret, Role.SERVER, exchange))

    def _welcome(self, hello: Frame, proof: str | None) -> Frame:
        job = hello.fields["job"]
        # Who names no job asks whose store it is, and learns it by the welcome.
        if self._job and job not in ("", self._job):
            raise StoreRefused(f"serves job {self._job!r}, not {job!r}")
        self.client = hello.fields["client"]
        fields = {"protocol": PROTOCOL, "job": self._job, "proof": proof}
        return Frame("welcome", hello.id, fields)


def _checked(hello: Frame) -> Frame:
    if hello.op != "hello":
        raise StoreRefused(f"a connection begins with hello, got {hello.op}")
    spoken, label = hello.fields["protocol"], hello.fields["client"]
    if spoken != PROTOCOL:
        raise StoreRefused(f"speaks protocol {PROTOCOL}, not {spoken}")
    if len(label) > LABEL_CHARACTERS:
        raise StoreRefused(f"a client's label is at most {LABEL_CHARACTERS} long, got {len(label)}")
    return hello
