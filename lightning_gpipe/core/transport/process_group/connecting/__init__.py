"""How processes find one another, and how long they wait."""
