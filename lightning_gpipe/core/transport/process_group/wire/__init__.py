"""Messages from one process to another, and the connection that carries them."""
