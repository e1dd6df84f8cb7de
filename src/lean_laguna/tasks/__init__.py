"""What models are asked to do: prompt sets, shared by everything that measures."""
