"""Balance: what nodes cost, which stages to cut a program into, and which rank each runs on."""
