"""What the tests of stores have in common."""

import foreign_stores  # noqa: F401 - registers kinds before the suite looks which there are
