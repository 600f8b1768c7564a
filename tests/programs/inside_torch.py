"""The command `elasticrun`, in a process of which some threads are inside torch all the time."""

import threading

from elasticlib.launch.entry import main as main
from elasticlib.rendezvous.bootstrap_store import open_torch_store


def stay_inside() -> None:
    while True:
        open_torch_store("127.0.0.1").close()


for _ in range(3):
    threading.Thread(target=stay_inside, daemon=True).start()
