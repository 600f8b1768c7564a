"""Stores: small, strongly consistent key-value tables for one job."""
