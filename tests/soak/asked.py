"""What the soak can ask of a worker, by number: the words of the board."""

EXCEPTION, EXIT, SEGFAULT, SLOW = range(1, 5)
