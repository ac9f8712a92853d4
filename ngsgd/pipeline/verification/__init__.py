"""`ngsgd verify`: jobs of a run are repeated and compared with the results that it counted."""
