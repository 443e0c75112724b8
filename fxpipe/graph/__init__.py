"""Graph: the values that pass from room to room, ``Program`` and ``StageGraph``, and what runs one stage."""
