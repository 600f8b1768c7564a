"""As much of torch as an agent uses, for tests whose workers use none: it costs no two seconds."""
