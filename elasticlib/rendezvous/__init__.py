"""Rendezvous: forms the generations of a job and assigns their ranks."""
