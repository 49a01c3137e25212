// Light or dark: the system's choice until the button is pressed. Loaded before the page is painted, so it does not flash.
(() => {
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  const stored = () => {
    try {
      return localStorage.getItem("selfspec.theme");
    } catch {
      return null; // storage is switched off
    }
  };
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

  const theme = stored();
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => button.setAttribute("aria-pressed", String(isDark()));
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem("selfspec.theme", root.dataset.theme);
      } catch {
        // it holds for this visit only
      }
      show();
    });
    system.addEventListener("change", show);
    show();
  });
})();
