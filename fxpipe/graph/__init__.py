"""Graph: the values that pass between packages, ``Program`` and ``StageGraph``, and what runs one stage."""
