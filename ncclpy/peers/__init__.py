"""What ranks of several processes know of each other, whatever they belong to."""
