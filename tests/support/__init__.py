"""What tests share: stores that fail, clocks that do not run by themselves, processes."""
