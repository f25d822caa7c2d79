// Light or dark: the system's choice, or this browser's.

export type Theme = "auto" | "light" | "dark";

const KEY = "etude-theme";
const NEXT: Readonly<Record<Theme, Theme>> = { auto: "dark", dark: "light", light: "auto" };

export function theme(): Theme {
  const kept = localStorage.getItem(KEY);
  return kept === "light" || kept === "dark" ? kept : "auto";
}

/** Set the page's theme; charts, which draw on canvases, hear of it by `etude-theme`. */
export function applyTheme(): void {
  const chosen = theme();
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  window.dispatchEvent(new Event("etude-theme"));
}

export function nextTheme(): Theme {
  localStorage.setItem(KEY, NEXT[theme()]);
  applyTheme();
  return theme();
}
