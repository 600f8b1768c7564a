"""torch.distributed.elastic's metrics, by the name `elasticlib.metrics`: torch's own, as they are.

A launch from Python puts its agent's numbers into the group `torchelastic`, for whatever handler is
configured there. What Prometheus is to scrape is elsewhere: `--observe-port`.
"""

from __future__ import annotations

from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import (
    ConsoleMetricHandler,
    MetricData,
    MetricHandler,
    MetricsConfig,
    MetricStream,
    NullMetricHandler,
    configure,
    get_elapsed_time_ms,
    getStream,
    prof,
    profile,
    publish_metric,
    put_metric,
)

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]
