"""Where jobs run: in this process, or in processes of their own."""
