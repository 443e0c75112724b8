"""Graph: ``Program`` and ``StageGraph``, the values that pass between packages, and their parts."""
