"""The part of torch that an agent uses, for tests whose workers use none. Its import is fast."""
