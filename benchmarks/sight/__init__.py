"""Small trainings with one planted fault each, under several tools: what each tool says by itself."""
