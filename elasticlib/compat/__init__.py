"""torch's names and shapes of failures. Only the package `launch` imports this one."""
