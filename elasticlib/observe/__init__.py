"""Events of a job, and what is derived from them: status, metrics, reports."""
