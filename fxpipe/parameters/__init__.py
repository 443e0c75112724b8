"""Parameters: who holds which tensor, where its values come from, and how they are saved."""
