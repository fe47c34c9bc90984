"""What knows other packages: the only room that imports them, each in a module of its own, when it is needed."""
