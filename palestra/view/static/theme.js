// Before the first paint: the theme chosen last, else that of the system.
{
	const stored = localStorage.getItem("palestra.theme");
	const system = matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark";
	document.documentElement.dataset.theme = stored || system;
}
