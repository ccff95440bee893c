"""What `cachectl check` looks at: a recipe, its model's source, programs around it, and a trace."""
