"""The command `elasticrun` in a process whose other threads always execute code of torch."""

import threading

from elasticlib.launch.entry import main as main
from elasticlib.rendezvous.bootstrap_store import open_torch_store


def call_torch_repeatedly() -> None:
    while True:
        open_torch_store("127.0.0.1").close()


for _ in range(3):
    threading.Thread(target=call_torch_repeatedly, daemon=True).start()
