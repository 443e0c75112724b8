"""Search: computes the costs of nodes, cuts a program into stages, and assigns stages to ranks."""
