"""A launch with options that have no command line flag.

Usage: launch_with_fields.py FIELDS FLAGS... SCRIPT ARGS... FIELDS is a JSON object with the values
of fields by their paths, such as `agent.regroup_grace`. They replace what the flags set.
"""

import json
import os
import sys

import attrs

from elasticlib.launch.arguments import parse_options
from elasticlib.launch.console import log_level, start_logging
from elasticlib.launch.elastic_launch import run_node
from elasticlib.launch.exit_summary import format_result

options, entrypoint = parse_options(sys.argv[2:])
for path, value in json.loads(sys.argv[1]).items():
    group, name = path.split(".")
    changed = attrs.evolve(getattr(options, group), **{name: value})
    options = attrs.evolve(options, **{group: changed})
start_logging(log_level(os.environ.get("LOGLEVEL", "INFO")), "%(message)s")
result = run_node(options, entrypoint, on_summary=sys.stderr.write)
sys.stderr.write(format_result(result))
sys.exit(result.exit_code)
