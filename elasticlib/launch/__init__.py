"""The launcher: elasticrun, the command elasticlib, and elastic_launch from Python."""
