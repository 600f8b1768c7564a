"""Recovery in place: workers keep running while their process group gets other members."""
