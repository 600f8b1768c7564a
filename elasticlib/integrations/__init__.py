"""What joins elasticlib to other people's programs; nothing else in elasticlib imports it.

Each module imports its program when it is imported itself, and says how to install what is missing.
"""
