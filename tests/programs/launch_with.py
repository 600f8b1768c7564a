"""A launch with more than a command line can say: `launch_with.py FIELDS ...`.

FIELDS is JSON: fields of the LaunchConfig, and as `agent` of its AgentOptions, beside what the
command line that follows says.
"""

import json
import os
import sys

import attrs

from elasticlib.launch.arguments import parse
from elasticlib.launch.console import log_level, start_logging
from elasticlib.launch.elastic_launch import run_node
from elasticlib.launch.exit_summary import format_result

fields = json.loads(sys.argv[1])
config, entrypoint = parse(sys.argv[2:])
agent = attrs.evolve(config.supervision.agent, **fields.pop("agent", {}))
supervision = attrs.evolve(config.supervision, agent=agent)
start_logging(log_level(os.environ.get("LOGLEVEL", "INFO")), "%(message)s")
config = attrs.evolve(config, supervision=supervision, **fields)
result = run_node(config, entrypoint, on_summary=sys.stderr.write)
sys.stderr.write(format_result(result))
sys.exit(result.exit_code)
