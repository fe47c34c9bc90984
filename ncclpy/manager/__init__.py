"""The Manager gathers the participants of a collective by key, and launches it when all have arrived."""
