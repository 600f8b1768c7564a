"""Worker processes: their specification, their start, and their connection to the agent."""
