"""A launch with settings that have no command line flag.

Usage: launch_with_fields.py FIELDS FLAGS... SCRIPT ARGS... FIELDS is a JSON object with fields of
LaunchConfig; the fields in `agent` are those of AgentOptions. They replace what the flags set.
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
