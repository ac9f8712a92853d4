"""Everything that can break, broken on purpose: who, when, how; and what must hold afterwards."""
