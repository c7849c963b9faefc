"""The pair matrix: rounds of disjoint pairs, workers that measure them, and the verdict."""
