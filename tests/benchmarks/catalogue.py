"""All benchmarks, in the order of the page: with which flags each is run, and for how long at most.

Together they take about 14 minutes on two cores, and a minute in their quick sizes, which show
that they run and no number worth a look.
"""

from __future__ import annotations

import ast
from pathlib import Path

import attrs

HERE = Path(__file__).resolve().parent


@attrs.frozen
class Benchmark:
    """One program of this folder.

    flags, quick: in its full size, and in one that is soon over. limit: seconds. needs: modules
    without which it is not run. make: the target whose environment has them.
    """

    name: str
    flags: str = ""
    quick: str = attrs.field(default="", kw_only=True)
    limit: float = attrs.field(default=120.0, kw_only=True)
    needs: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    make: str = attrs.field(default="bench", kw_only=True)
    folder: Path = attrs.field(default=HERE, kw_only=True)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.py"

    def command(self, quick: bool = False) -> str:
        """As somebody types it who repeats it."""
        return " ".join(("python", f"tests/benchmarks/{self.path.name}", *self.given(quick)))

    def given(self, quick: bool) -> tuple[str, ...]:
        return tuple((self.quick if quick else self.flags).split())

    def about(self) -> tuple[str, str]:
        """Its title and its text, which are its docstring's; nothing of it is imported."""
        doc = ast.get_docstring(ast.parse(self.path.read_text())) or self.name
        title, _, text = doc.partition("\n\n")
        return " ".join(title.split()).rstrip("."), text


ALL = (
    Benchmark(
        "recovery",
        "--spawn --rest 5",
        quick="--parts restart,start --rounds 1 --kills 1 --repeat 1",
        limit=420,
    ),
    Benchmark(
        "rendezvous",
        quick="--nodes 8 --torch-up-to 8 --apart 8 --processes 2 --standing 8 --idle 1 --repeat 1",
        limit=420,
    ),
    Benchmark(
        "plugs",
        quick="--backends el-file --stories host",
        limit=480,
    ),
    Benchmark("context", quick="--calls 10000 --repeat 2"),
    Benchmark("events", quick="--repeat 1 --rest 2 --rests 1", limit=240),
    Benchmark("sampler", quick="--lengths 1000000 --worlds 1 --repeat 1", limit=180),
    Benchmark("checkpoint", quick="--mib 32 --repeat 1", limit=480),
    Benchmark("logical", quick="--rounds 2", limit=180),
    Benchmark("startup", quick="--runs 1"),
    Benchmark(
        "frameworks",
        quick="--frameworks accelerate --repeat 1",
        limit=900,
        needs=("lightning", "transformers", "accelerate"),
        make="bench-integrations",
    ),
)
