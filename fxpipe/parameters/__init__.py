"""Parameters: which rank holds which tensor, where its values come from, and how they are saved."""
