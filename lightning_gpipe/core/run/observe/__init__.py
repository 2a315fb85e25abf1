"""Records when actions ran and how long they took, and chooses between threads and inline."""
