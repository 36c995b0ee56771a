"""What an evaluation needs besides a program: a table, kept answers, statistics, a report."""
