"""What changes when a model's units run in another order or on another input. Every ablation is a schedule."""
