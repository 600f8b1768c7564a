"""What is shown at /metrics, in Prometheus' text: written by `prometheus-client`, the extra
`metrics`, and by nobody else where that is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ConfigError
from .exposed import FAMILIES, Family, Moment, Shape, buckets, samples

MISSING = (
    "/metrics needs prometheus-client: pip install 'elasticlib[metrics]' "
    "(/healthz and /status.json need nothing)"
)


class Exposition:
    """Shows each moment as it is asked for; keeps nothing itself.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self, moment: Callable[[], Moment]) -> None:
        try:
            import prometheus_client
            import prometheus_client.core as core
        except ImportError as error:
            raise ConfigError(MISSING) from error
        self._client: Any = prometheus_client
        self._kinds: dict[Shape, Any] = {
            Shape.GAUGE: core.GaugeMetricFamily,
            Shape.COUNTER: core.CounterMetricFamily,
            Shape.HISTOGRAM: core.HistogramMetricFamily,
        }
        self._moment = moment
        # One of its own: the program's own metrics are no affair of the agent's.
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)

    def text(self) -> tuple[str, bytes]:
        """The type of the content, and the content."""
        content: bytes = self._client.generate_latest(self._registry)
        return str(self._client.CONTENT_TYPE_LATEST), content

    def describe(self) -> list[Any]:
        """Nothing is looked at while it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """As prometheus-client asks a collector."""
        moment = self._moment()
        shared = (moment.status.run, moment.status.node)
        made = {name: self._made(family) for name, family in FAMILIES.items()}
        for sample in samples(moment):
            family, labels = made[sample.family], [*shared, *sample.labels]
            if isinstance(sample.value, (int, float)):
                family.add_metric(labels, sample.value)
            else:
                durations = sample.value
                family.add_metric(labels, buckets(durations), sum_value=durations.seconds)
        return iter(family for family in made.values() if family.samples)

    def _made(self, family: Family) -> Any:
        labels = ["run", "node", *family.labels]
        return self._kinds[family.shape](family.name, family.meaning, labels=labels)
