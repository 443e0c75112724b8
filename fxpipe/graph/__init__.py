"""Graph: ``Program`` and ``StageGraph``, which pass between packages, and the code that runs a stage."""
