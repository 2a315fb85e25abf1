"""What one process sends to another, and the connection that carries it."""
